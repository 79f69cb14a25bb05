"""tinykv: every method of five papers on KV-cache quantization, small enough to read."""


class UserError(ValueError):
    """Bad input. One line: what was found, what was expected, what to do. Commands print it and exit with status 2."""
