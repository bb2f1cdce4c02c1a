"""What results are held against: a float64 oracle, and a one-process twin that is bitwise."""
