"""Templates of emitted text: layout only, loops over ready records."""
