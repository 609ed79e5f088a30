"""Spack's recipe; `packaging/README.md` says how it is used."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcstage(PythonPackage):
    """Stages datasets to node-local disks of HPC clusters while the job trains."""

    license("Apache-2.0")

    version("0.1.0")

    variant("mpi", default=True, description="Nodes of a job exchange files")

    depends_on("c", type="build")
    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-click@8.1:")
        depends_on("py-rich@13:")
        depends_on("py-psutil@5.9:")
        depends_on("py-pyyaml@6:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-mpi4py@3.1:", when="+mpi")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        """Makes an extension that cannot be built an error: hpcstage does without, more slowly."""
        env.set("HPCSTAGE_REQUIRE_NATIVE", "1")
