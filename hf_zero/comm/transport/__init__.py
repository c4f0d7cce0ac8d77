"""How the bytes of one group are moved: one file per way."""
