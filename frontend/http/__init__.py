"""HTTP: the application, its routes, who may call them, and what the server says of itself."""
