"""The command line: `main.app` and one file per subcommand. Nothing here imports torch early."""
