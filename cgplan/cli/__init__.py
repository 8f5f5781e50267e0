"""The command line: the only part of cgplan that prints or exits."""
