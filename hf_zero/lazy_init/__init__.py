"""Models built without their values: how initialisation is recorded and replayed."""
