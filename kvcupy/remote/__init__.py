"""What leaves the process: shared stores, migration, the identity and wire format of pages."""
