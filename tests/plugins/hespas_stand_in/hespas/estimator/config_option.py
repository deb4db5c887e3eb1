class ConfigOption:
    def __init__(self, validate, *, default=None, optional=False, description=None):
        self.validate, self.default = validate, default
        self.optional = optional or default is not None
