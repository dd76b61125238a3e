"""Adds the C++ kernels to wheels, compiled for several sets of instructions; without a compiler, wheels are pure."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class WithKernels(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            compile_for_wheel = runpy.run_path("mmspec/ops/builds.py")["compile_for_wheel"]
            machine = compile_for_wheel(Path(self.build_lib, "mmspec/ops/prebuilt"))
            wheel = self.distribution.get_command_obj("bdist_wheel")
            wheel.machine, wheel.root_is_pure = machine, machine is None
            self.distribution.has_ext_modules = lambda: machine is not None  # chooses the folder within the wheel


class PlatformWheel(bdist_wheel):
    """A wheel for any Python, and for one platform if it contains kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        return super().get_tag() if self.root_is_pure else ("py3", "none", f"linux_{self.machine}")


setup(cmdclass={"build_py": WithKernels, "bdist_wheel": PlatformWheel})
