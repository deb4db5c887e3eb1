existing_estimators = ["roofline"]
available = {}


def add_estimator_choice(name, cls):
    if name in available:
        raise ValueError(f"duplicate {name}")
    available[name] = (cls, cls.conditions)
