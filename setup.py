"""Package names: the folders `evals` and `integrations` install under names that cannot clash with anyone else's."""

from setuptools import find_packages, setup

FOLDERS = {"tokred": "tokred", "tokred_evals": "evals", "tokred_integrations": "integrations"}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
)
