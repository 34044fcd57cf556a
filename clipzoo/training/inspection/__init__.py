"""What a training shows of itself: throughput, diagnostics, divergence."""
