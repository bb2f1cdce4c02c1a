"""Plans that change while they serve: experts that move, ranks that come and go, calls that survive a lost rank."""
