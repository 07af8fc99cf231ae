"""Pages across processes: shared stores, migration and the wire format."""
