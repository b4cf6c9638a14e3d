"""The workloads; each package holds one experiment."""
