"""The session with the scheduler, and the choices that are open in it."""
