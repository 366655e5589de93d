"""What things cost on a cluster: seconds of operators, collectives and conversions, bytes of memory, time of a schedule."""
