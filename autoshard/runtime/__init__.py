"""What emitted programs need at run time: torch and the standard library only. Files are copied beside the program."""
