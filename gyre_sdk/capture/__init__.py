"""Standing in front of a harness: dialects, renderer door, matcher, recorder, gateway, WAL."""
