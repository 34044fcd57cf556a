"""Generated worlds, emoji and drawings by many hands: small datasets on which a model learns in minutes."""
