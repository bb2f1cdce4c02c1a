"""What measures and demonstrates the layer: benchmarks, evaluation, the shipped model, generated tables."""
