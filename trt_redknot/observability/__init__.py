"""What happens, told to whoever operates the program: events, metrics, structured logs. Handed in, never global."""
