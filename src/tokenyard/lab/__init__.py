"""What measures and demonstrates the layer: benchmarks, evaluation, soaking, the shipped model, generated tables."""
