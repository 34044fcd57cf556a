"""Generated worlds and emoji: small datasets on which a model learns in minutes."""
