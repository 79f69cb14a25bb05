"""tinykv: every method of five papers on KV-cache quantization, small enough to read."""


class UserError(ValueError):
    """Bad input. One line: what was found, what was expected, what to do. Commands print it and
    exit with status 2."""


def at_least(least, **settings):
    """UserError if a setting is below what it can be; None is no setting."""
    for name, value in settings.items():
        if value is not None and value < least:
            raise UserError(f"{name.replace('_', ' ')} must be at least {least}; got {value}")


def one_of(choices, **settings):
    """UserError if a setting is none of its choices; None is no setting."""
    for name, value in settings.items():
        if value is not None and value not in choices:
            name = name.replace("_", " ")
            raise UserError(f"{name} is one of {', '.join(choices)}; got {value!r}")
