"""One module a subcommand, each with ``main(arguments) -> exit status``."""
