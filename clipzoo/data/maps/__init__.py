"""Maps over shards: their engines, the facts about samples, and near-duplicates."""
