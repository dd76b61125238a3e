"""Skip this folder if a package of the demo is missing."""


def pytest_pycollect_makemodule():
    import tests.demos.serving  # noqa: F401
