"""The engine: what is sharded, when it is gathered and reduced, and how it is stepped."""
