"""The papers' benchmark sets: what they are, how they are read, which prompts they take."""
