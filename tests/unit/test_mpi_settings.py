"""What is set before MPI starts: the user's own settings win, and each MPI gets its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.communication import mpi_settings
from pushreduce.communication.mpi_settings import Launch, before_mpi, read_launch

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
OPENMPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
OPENMPI_5 = "Open MPI v5.0.11, package: Open MPI ..."
LIBRARIES = st.sampled_from([MPICH, OPENMPI_4, OPENMPI_5, "Some other MPI 1.0"])
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_STEP_ID": "0"}
LAUNCHES = st.builds(Launch, st.integers(1, 64), st.integers(1, 64), st.just(0), st.none())


@given(
    LIBRARIES,
    LAUNCHES,
    st.integers(1, 64),
    st.sets(st.sampled_from(["lo", "eth0", "docker0", "br-1"])),
    st.data(),
)
def test_what_the_user_set_is_never_touched(
    library: str, launch: Launch, num_cores: int, interfaces: set[str], data: st.DataObject
) -> None:
    wanted = before_mpi(library, launch, num_cores, interfaces, False, {})
    of_user = data.draw(st.sets(st.sampled_from(sorted(wanted))))
    rest = before_mpi(library, launch, num_cores, interfaces, False, dict.fromkeys(of_user, "mine"))
    assert rest == {name: value for name, value in wanted.items() if name not in of_user}


def test_each_mpi_gets_its_own() -> None:
    alone, crowded = Launch(1, 1, 0, None), Launch(8, 8, 0, "PMI_SIZE")
    assert before_mpi(OPENMPI_4, alone, 2, [], False, {})["OMPI_MCA_osc"] == "ucx"
    assert before_mpi(OPENMPI_5, alone, 2, [], False, {})["OMPI_MCA_osc"] == "^ucx"
    assert not any(
        name.startswith(("OMPI", "PMIX")) for name in before_mpi(MPICH, crowded, 2, ["docker0"], False, {})
    )
    assert "HOROVOD_CYCLE_TIME" in before_mpi(MPICH, crowded, 2, [], False, {})
    assert "HOROVOD_CYCLE_TIME" not in before_mpi(MPICH, crowded, 8, [], False, {})


def test_where_time_is_stretched_horovods_cycle_is_too():
    launch = Launch(4, 4, 0, "PMI_SIZE")

    def cycle(num_cores: int, time_stretch: float, **environment: str) -> str | None:
        made = before_mpi(MPICH, launch, num_cores, [], False, environment, time_stretch)
        return made.get("HOROVOD_CYCLE_TIME")

    assert cycle(2, 1.0) == "5"
    assert cycle(2, 4.0) == "20"
    assert cycle(8, 4.0) == "4"
    assert cycle(8, 1.0) is None
    assert cycle(2, 4.0, HOROVOD_CYCLE_TIME="3") is None


def test_bridges_are_left_out_between_hosts_only() -> None:
    two_hosts = Launch(4, 2, 0, "OMPI_COMM_WORLD_SIZE")
    interfaces = ["lo", "eth0", "docker0", "br-17"]
    assert (
        before_mpi(OPENMPI_5, two_hosts, 2, interfaces, False, {})["OMPI_MCA_btl_tcp_if_exclude"]
        == "lo,br-17,docker0"
    )
    including = {"OMPI_MCA_btl_tcp_if_include": "eth0"}
    assert "OMPI_MCA_btl_tcp_if_exclude" not in before_mpi(
        OPENMPI_5, two_hosts, 2, interfaces, False, including
    )
    assert "OMPI_MCA_btl_tcp_if_exclude" not in before_mpi(
        OPENMPI_5, Launch(4, 4, 0, None), 2, interfaces, False, {}
    )


def test_mpich_is_given_the_other_interfaces_unless_it_has_better_ones() -> None:
    two_hosts, interfaces = Launch(4, 2, 0, "PMI_SIZE"), ["lo", "eth0", "docker0", "eth1"]
    assert before_mpi(MPICH, two_hosts, 2, interfaces, False, {})["UCX_NET_DEVICES"] == "eth0,eth1"
    assert "UCX_NET_DEVICES" not in before_mpi(MPICH, two_hosts, 2, interfaces, True, {})
    assert "UCX_NET_DEVICES" not in before_mpi(MPICH, two_hosts, 2, ["lo", "eth0"], False, {})
    assert "UCX_NET_DEVICES" not in before_mpi(MPICH, two_hosts, 2, ["lo", "docker0"], False, {})


def test_the_launch_is_read_from_each_launcher() -> None:
    assert read_launch({}, on_terminal=False) == Launch(1, 1, 0, None)
    hydra = {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "2"}
    assert read_launch(hydra, on_terminal=False) == Launch(8, 2, 5, "PMI_SIZE")
    orte = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert read_launch(orte, on_terminal=False) == Launch(4, 4, 3, "OMPI_COMM_WORLD_SIZE")
    assert read_launch(SRUN, on_terminal=False) == Launch(8, 8, 5, "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_shell_that_srun_started_is_no_launcher(on_terminal: bool) -> None:
    """`srun --ntasks=8 --pty bash`: one worker there is alone, and an mpirun there counts, not the step around it."""
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "34889"}
    assert read_launch(shell, on_terminal=True) == Launch(1, 1, 0, None)
    mpirun = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
    assert read_launch({**shell, **mpirun}, on_terminal=on_terminal) == Launch(2, 2, 1, "PMI_SIZE")


def table(**of_long_sums: object) -> bytes:
    sums = {"avg_msg_size=any": {"is_op_built_in=yes": {"count<pow2": {"algorithm=X": {}}, **of_long_sums}}}
    return json.dumps(
        {"collective=allreduce": {"comm_type=intra": sums}, "collective=bcast": {"k": {}}}
    ).encode()


def test_the_ring_is_put_into_the_library_s_own_table(tmp_path: Path) -> None:
    library = tmp_path / "libmpi.so"
    default = {"algorithm=MPIR_Allreduce_intra_reduce_scatter_allgather": {}}
    of_shared_memory = b'{"collective=allreduce":{"comm_type=intra":{"algorithm=MPIDI_POSIX":{}}}}'
    library.write_bytes(
        b"\x7fELF" + of_shared_memory + b"\0" + table(**{"count=any": default}).replace(b": ", b":") + b"\0.."
    )
    text = mpi_settings.ring_table(library)
    assert text is not None
    changed = json.loads(text)
    assert changed["collective=bcast"] == {"k": {}}
    sums = changed["collective=allreduce"]["comm_type=intra"]["avg_msg_size=any"]["is_op_built_in=yes"]
    assert sums["count<pow2"] == {"algorithm=X": {}}
    small, large = sums["count=any"].items()
    assert small == (f"avg_msg_size<{mpi_settings.RING_THRESHOLD_BYTES}", default)
    assert large == ("avg_msg_size=any", {"algorithm=MPIR_Allreduce_intra_ring": {}})


@pytest.mark.parametrize(
    "content", [b"", b'\x7fELF{"collective=', b'{"collective=x":{}}\0', table(other={}) + b"\0"]
)
def test_an_unknown_table_leaves_the_default(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / "libmpi.so"
    library.write_bytes(content)
    assert mpi_settings.ring_table(library) is None
    assert mpi_settings.ring_variables(library, Launch(4, 1, 0, None), {}) == {}


def test_the_ring_is_for_several_hosts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = tmp_path / "libmpi.so"
    library.write_bytes(
        table(**{"count=any": {"algorithm=MPIR_Allreduce_intra_x": {}}}).replace(b": ", b":") + b"\0"
    )
    several = Launch(4, 2, 0, None)
    made = mpi_settings.ring_variables(library, several, {})
    assert Path(made["MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE"]).read_text() == mpi_settings.ring_table(
        library
    )
    assert mpi_settings.ring_variables(library, several, {}) == made
    assert mpi_settings.ring_variables(library, Launch(4, 4, 0, None), {}) == {}
    assert (
        mpi_settings.ring_variables(library, several, {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "auto"}) == {}
    )


def test_two_libraries_are_told_from_one_with_two_names(tmp_path: Path) -> None:
    (tmp_path / "libmpich.so.12").touch()
    (tmp_path / "libmpi.so.12").symlink_to("libmpich.so.12")
    (tmp_path / "libmpi.so.40").touch()

    def line(name: str) -> str:
        return f"7f0000-7f0001 r-xp 00000000 fd:00 17   {tmp_path}/{name}\n"

    one = line("libmpi.so.12") + line("libmpich.so.12") + line("libmpicxx.so") + line("MPI.mpich.so")
    assert mpi_settings.mpi_libraries(one) == [f"{tmp_path}/libmpich.so.12"]
    assert len(mpi_settings.mpi_libraries(one + line("libmpi.so.40"))) == 2
