"""Map `bundles/quartet-mini` into the wheel as `service.default_bundle`. All other settings are in pyproject.toml."""

from setuptools import find_packages, setup

DEFAULT_BUNDLE = "service.default_bundle"

setup(
    packages=[
        *find_packages(include=["service*", "model*", "export*", "quartet*"]),
        DEFAULT_BUNDLE,
    ],
    package_dir={DEFAULT_BUNDLE: "bundles/quartet-mini"},
)
