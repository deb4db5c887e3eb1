from .config_option import ConfigOption
from .result import ModuleResult


def register_op_handler(names):
    def mark(function):
        function.handles = names
        return function

    return mark


def register_default_op_handler(function):
    function.handles_others = True
    return function


class Meta(type):
    def __new__(cls, name, bases, namespace):
        if bases and "__init__" in namespace:
            raise ValueError("use __post_init__")
        made = super().__new__(cls, name, bases, namespace)
        made.options = {k: v for k, v in namespace.items() if isinstance(v, ConfigOption)}
        functions = [v for v in namespace.values() if callable(v)]
        made.handlers = {n: f for f in functions for n in getattr(f, "handles", ())}
        made.others = next((f for f in functions if hasattr(f, "handles_others")), None)
        return made


class Estimator(metaclass=Meta):
    conditions = None

    def __init__(self, hw_config):
        self.hw_config, self.cache = hw_config, {}
        for name in hw_config:
            if name not in self.options:
                raise ValueError(f"unknown option {name}")
        for name, option in self.options.items():
            if name not in hw_config and not option.optional:
                raise ValueError(f"missing option {name}")
            value = hw_config.get(name, option.default)
            setattr(self, name, option.validate(value))
        self.__post_init__()

    def __post_init__(self):
        pass

    def get_estimate(self, module):
        key = f"{module.mlir_string}{self.hw_config}"
        if key not in self.cache:
            self.cache[key] = self.run(module)
        return self.cache[key]

    def run(self, module):
        if not self.handlers:
            return self._get_whole_module_result(module)
        found = [self.estimate_op(o) for o in module.ops_list]
        seconds = sum(r.runtime_estimate for r in found)
        return ModuleResult(all(r.success for r in found), seconds, {}, module)

    def estimate_op(self, op_info):
        handler = self.handlers.get(op_info.op_name)
        return handler(self, op_info) if handler else self.others(op_info)
