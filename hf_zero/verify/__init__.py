"""`hf-zero verify`: shows that a sharded run computes what plain data parallelism computes, or names what differs."""
