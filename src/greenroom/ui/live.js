/* The connection: one stream of events and of what they changed; a server that streams no state is asked for it instead.
   Nothing here touches a model.

   A stream that breaks is opened again after 1, 2, 4 ... 15 s (at once when the tab is looked at again); a restarted
   server is noticed by its boot id, or by event numbers that begin again, and then everything is read anew. */

import {call, events, json, jsonOrNull, path, Refusal} from './api.js';
import {announce} from './announce.js';
import {changed, isBusy, readState} from './state.js';
import {put, serverNow, setClock, store, ui} from './store.js';

const WAITS_S = [1, 2, 4, 8, 15];
const EVENTS_KEPT = 200;
const SILENCE_S = 40; // the server says something every 15 s
const BUSY_MS = 1000; // how often the state is read while something moves ...
const QUIET_MS = 5000; // ... and while nothing does
const GAP_MS = 250; // between two reads, however many events come
const HIDDEN_S = 60;
const STORY_MS = 2000;
const ANNOUNCED = new Set(['ready', 'asleep', 'failed', 'fetched', 'fetch_failed', 'fetch_stopped']);

let stream = null; // AbortController of the open stream
let failures = 0;
let lastId = null;
let isTold = false; // the stream tells the state as well
let retryTimer = 0;
let pollTimer = 0;
let readAt = 0;
let reading = null;
let isDirty = false;
let heardAt = 0;
let hiddenTimer = 0;

export function start() {
  document.addEventListener('visibilitychange', seen);
  addEventListener('online', () => reconnect());
  setInterval(watchSilence, 5000);
  connect();
}

/** Tries at once, whatever the waiting time. */
export function reconnect() {
  if (store.link === 'live' && stream) return;
  clearTimeout(retryTimer);
  connect();
}

function seen() {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => { // nobody looks: cost the server nothing
      stop();
      clearTimeout(retryTimer);
      clearTimeout(pollTimer);
    }, HIDDEN_S * 1000);
  } else if (!stream) {
    reconnect();
  } else {
    refresh();
  }
}

function stop() {
  stream?.abort();
  stream = null;
}

async function connect() {
  stop();
  const mine = stream = new AbortController();
  isTold = false;
  try {
    if (store.me === null) put({me: await jsonOrNull('api/me', {signal: mine.signal})});
    const response = await call('api/events', {
      signal: mine.signal, headers: {Accept: 'text/event-stream', ...(lastId ? {'Last-Event-ID': lastId} : {})},
    });
    await renew(mine.signal);
    await readPast(mine.signal);
    failures = 0;
    const wasLost = store.link === 'lost' || store.link === 'error';
    put({link: 'live', problem: null, lostAt: null, retryAt: null});
    if (wasLost) announce('The connection is back');
    heardAt = performance.now();
    schedule();
    readTimeline();
    for await (const event of events(response)) {
      heardAt = performance.now();
      if (event.data) take(event);
    }
    throw new TypeError('the stream ended');
  } catch (error) {
    if (mine.signal.aborted && stream !== mine) return;
    stream = null;
    lost(error);
  }
}

function lost(error) {
  clearTimeout(pollTimer);
  const isDenied = error instanceof Refusal && (error.status === 401 || error.status === 403);
  const wait = WAITS_S[Math.min(failures++, WAITS_S.length - 1)] * (0.8 + Math.random() * 0.4);
  if (store.link === 'live') announce('The connection is lost');
  const link = isDenied ? 'denied' : error instanceof Refusal ? 'error' : 'lost';
  put({link, problem: error, lostAt: store.lostAt ?? serverNow(), retryAt: isDenied ? null : performance.now() + wait * 1000});
  if (!isDenied) retryTimer = setTimeout(connect, wait * 1000);
}

function watchSilence() {
  if (store.link === 'live' && stream && performance.now() - heardAt > SILENCE_S * 1000) {
    stop();
    lost(new TypeError('silence'));
  }
}

// ---- events

async function readPast(signal) {
  const {events: past} = await json('api/events?follow=0&limit=100', {signal});
  store.events = past.slice().reverse();
  const newest = past.length ? past[past.length - 1].id : null;
  lastId = newest != null ? String(newest) : null;
}

function take(event) {
  let message;
  try {
    message = JSON.parse(event.data);
  } catch {
    return;
  }
  if (event.id) lastId = event.id;
  if (message.now) setClock(message.now);
  if (message.kind === 'snapshot' || message.kind === 'status') {
    isTold = true;
    noticeRestart(changed(message));
    return;
  }
  if (message.id != null && store.events.some(one => one.id === message.id)) return;
  if (message.text && message.kind !== 'dropped') store.events = [message, ...store.events].slice(0, EVENTS_KEPT);
  if (ANNOUNCED.has(message.kind)) announce(`${message.model}: ${message.text}`);
  if (message.model && store.stories[message.model]) readStory(message.model);
  refresh();
  soonTimeline();
}

// ---- the state, where the stream does not tell it

/** Reads the state again, at once or as soon as the gap allows. */
export function refresh() {
  isDirty = true;
  if (reading || isTold) return;
  clearTimeout(pollTimer);
  pollTimer = setTimeout(poll, Math.max(0, readAt + GAP_MS - performance.now()));
}

function schedule() {
  clearTimeout(pollTimer);
  if (store.link === 'live' && !isTold) pollTimer = setTimeout(poll, isBusy() ? BUSY_MS : QUIET_MS);
}

async function poll() {
  if (!stream || isTold) return;
  isDirty = false;
  reading = renew(stream.signal).catch(error => {
    if (error instanceof Refusal && stream) {
      stop();
      lost(error);
    } // else the stream breaks as well, and tells
  });
  await reading;
  reading = null;
  if (isDirty) refresh();
  else schedule();
}

async function renew(signal) {
  readAt = performance.now();
  noticeRestart(await readState(signal));
}

/** Another server answers now: what was known of the old one is read anew. */
function noticeRestart(isAnother) {
  if (!isAnother) return;
  lastId = null;
  put({stories: {}});
  jsonOrNull('api/me').then(me => put({me}), () => {});
  soonTimeline();
}

// ---- what is read on its own

/** Reads a model's story unless that has been done; events about it keep it fresh, and while it moves, time does. */
export function ensureStory(id, isMoving = false) {
  const known = store.stories[id];
  if (!known || (isMoving && !known.isReading && store.link === 'live' && performance.now() - known.at > STORY_MS)) queueMicrotask(() => {
    if (store.stories[id] === known) readStory(id);
  });
}

export async function readStory(id) {
  const known = store.stories[id];
  if (known?.isReading) {
    known.again = true;
    return;
  }
  const mine = store.stories[id] = {story: known?.story ?? null, off: known?.off, at: performance.now(), isReading: true};
  try {
    const said = await jsonOrNull(path(id, '/why'));
    Object.assign(mine, {story: Array.isArray(said) ? said : said?.story ?? [], off: said?.sleep_off || ''});
  } catch { /* the last one stays */ }
  mine.isReading = false;
  put();
  if (mine.again) readStory(id);
}

let timelineAt = 0;
let timelineTimer = 0;

function soonTimeline() {
  if (store.timeline === null) return;
  clearTimeout(timelineTimer);
  timelineTimer = setTimeout(readTimeline, Math.max(150, timelineAt + 2000 - performance.now()));
}

async function readTimeline() {
  timelineAt = performance.now();
  try {
    const timeline = await jsonOrNull('api/timeline?minutes=15');
    if (!ui.held) put({timeline});
  } catch { /* the last one stays */ }
}
