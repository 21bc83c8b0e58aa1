"""The command line: `drivetrain` with its subcommands, and TrainCLI for a script of one's own."""
