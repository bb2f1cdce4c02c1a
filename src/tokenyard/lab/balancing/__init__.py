"""Whether another placement of the experts pays: routes of a real run, and what they would cost on other ranks."""
