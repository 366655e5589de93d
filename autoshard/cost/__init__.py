"""What things cost on a cluster: seconds of operators, collectives, conversions and schedules, bytes of memory."""
