"""Commands on runs: reading, comparing, forking, checking, sharing."""
