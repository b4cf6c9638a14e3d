"""Storage: run directories, the ledger, locks, tables, artifacts and caches."""
