"""Commands on datasets: shards, benchmark datasets, the generated dataset and emoji."""
