"""Adds the C++ kernels to wheels, compiled for several sets of instructions; without a compiler, wheels are pure."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithKernels(build_py):
    def run(self) -> None:
        super().run()
        compile_for_wheel = runpy.run_path("mmspec/ops/builds.py")["compile_for_wheel"]
        if not self.editable_mode and (machine := compile_for_wheel(Path(self.build_lib, "mmspec/ops/prebuilt"))):
            self.distribution.has_ext_modules = lambda: True  # chooses the folder within the wheel
            wheel = self.distribution.get_command_obj("bdist_wheel")
            wheel.root_is_pure, wheel.get_tag = False, lambda: ("py3", "none", f"linux_{machine}")


setup(cmdclass={"build_py": WithKernels})
