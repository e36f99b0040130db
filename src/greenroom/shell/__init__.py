"""The one asyncio heart: events into the scheduler, its actions out as tasks, each task's end as one event."""
