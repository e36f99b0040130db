"""Models as OCI artifacts: named by references, fetched from registries, kept once on disk."""
