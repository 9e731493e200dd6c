"""Other training loops. Each module imports its library only when it is asked for."""
