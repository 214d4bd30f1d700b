"""The oracle against torch.optim, against LASGD worked by hand, and against traces that cannot be."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.simulation.global_view import SGD, Adam, mean_drift, replay_allreduce, replay_lasgd

rates = st.floats(1e-3, 0.5)
decays = st.sampled_from([0.0, 1e-4, 0.3])
max_norms = st.sampled_from([None, 0.1, 1.0, 100.0])


@st.composite
def optimizers(draw):
    """An oracle's rule, and the torch optimizer that it must equal."""
    decay, max_norm, rate = draw(decays), draw(max_norms), draw(rates)
    name = draw(st.sampled_from(["sgd", "adam", "adamw"]))
    if name == "sgd":
        momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
        nesterov = draw(st.booleans()) and momentum > 0
        rule = SGD(momentum, nesterov, decay, max_norm)
        return (
            rule,
            max_norm,
            lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay),
        )
    beta1, beta2 = draw(st.floats(0.0, 0.95)), draw(st.floats(0.5, 0.999))
    rule = Adam(beta1, beta2, weight_decay=decay, decoupled=name == "adamw", max_grad_norm=max_norm)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return rule, max_norm, lambda p: kind(p, lr=rate, betas=(beta1, beta2), weight_decay=decay)


@settings(max_examples=100)
@given(optimizers(), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_rules_equal_torch(optimizer, seed, num_steps):
    rule, max_norm, build = optimizer
    rng = np.random.default_rng(seed)
    x = rng.normal(size=6)
    parameter = torch.nn.Parameter(torch.tensor(x))
    reference = build([parameter])
    for _ in range(num_steps):
        g, rate = rng.normal(size=6), float(rng.uniform(1e-3, 0.5))
        x = rule.update(x, g, rate)
        parameter.grad = torch.tensor(g)
        reference.param_groups[0]["lr"] = rate
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        reference.step()
        np.testing.assert_allclose(x, parameter.detach().numpy(), rtol=1e-12, atol=1e-13)


# -- LASGD


def step(k, rate=0.5, num_samples=1):
    return {"event": "step", "step": k, "num_samples": num_samples, "learning_rate": rate}


def post(t):
    return {"event": "post", "round": t}


def apply(t):
    return {"event": "apply", "round": t}


def quadratic(rank, _step, x):
    """Of (x - target)^2 / 2, with the targets 0 and 8."""
    return x - 8.0 * rank


TWO_RANKS = [
    [step(0), post(0), step(1), apply(0), post(1), apply(1)],
    [step(0), post(0), step(1), step(2), apply(0), post(1), apply(1)],
]


@pytest.mark.parametrize(
    ("alpha", "beta", "expected"),
    [
        # Both begin at 4 and move half of the way to their target at every step.
        # Rank 0: 2 = s; 1; rank 1: 6 = s; 7; 7.5. z_0 = 4: rank 0: 1 + 2 = 3, rank 1: 7.5 - 2 = 5.5.
        # z_1 = (3 + 5.5) / 2 = 4.25, and nothing happens in between: both are there.
        (1.0, 1.0, [4.25, 4.25]),
        # alpha 1/2: rank 0: 1 + 1 = 2, rank 1: 7.5 - 1 = 6.5. z_1 = 4.25: 2 + 1.125 and 6.5 - 1.125.
        (0.5, 1.0, [3.125, 5.375]),
        # beta 1/2: z_0 = 4 / 2 + 4 / 2 = 4, as with beta 1: 3 and 5.5. z_1 = 4 / 2 + 4.25 / 2 = 4.125.
        (1.0, 0.5, [4.125, 4.125]),
    ],
)
def test_lasgd_by_hand_on_a_quadratic(alpha, beta, expected):
    x = replay_lasgd(np.array([4.0]), TWO_RANKS, quadratic, SGD(), alpha=alpha, beta=beta)
    assert x[:, 0].tolist() == expected


def test_one_worker_is_plain_sgd():
    rule = SGD(0.9, True, 1e-3)
    trace = [[step(0), post(0), step(1), apply(0), post(0 + 1), step(2), step(3), apply(1)]]
    x = replay_lasgd(np.array([3.0, -1.0]), trace, quadratic, rule)
    plain = np.array([3.0, -1.0])
    for k in range(4):
        plain = rule.update(plain, quadratic(0, k, plain), 0.5)
    np.testing.assert_allclose(x[0], plain, rtol=1e-15)


def run_lasgd(communicator, x0, num_rounds, tau_max, alpha, beta):
    """Algorithm 1 with constant gradients 1 + rank, as a bare loop: trace, x, and the sum of its steps."""
    x, z, s, moved = x0.clone(), x0.clone(), x0, torch.zeros_like(x0)
    trace, tau, t, num_steps, handle = [], 0, 0, 0, None
    while t < num_rounds:
        communicator.clock.sleep(torch.rand(()).item() * 1e-3)
        x -= 0.1 * (1 + communicator.rank)
        moved -= 0.1 * (1 + communicator.rank)
        trace.append(step(num_steps, rate=0.1))
        num_steps, tau = num_steps + 1, tau + 1
        if handle is not None and (tau == tau_max or handle.done()):
            z = (1 - beta) * z + beta * handle.wait()
            x += alpha * (z - s)
            trace.append(apply(t))
            handle, t = None, t + 1
        if handle is None and t < num_rounds:
            s, tau = x.clone(), 0
            trace.append(post(t))
            handle = communicator.average_async(s, "weights")
    return trace, x, moved


@settings(max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1.0, 10.0]),
    st.integers(1, 5),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([1.0, 0.25]),
)
def test_lasgd_equals_a_bare_loop_under_any_interleaving(num_ranks, seed, jitter, tau_max, alpha, beta):
    x0 = torch.randn(5, dtype=torch.float64)
    cluster = SimulatedCluster(num_ranks, seed=seed, jitter=jitter)
    outcome = cluster.run(lambda communicator: run_lasgd(communicator, x0, 6, tau_max, alpha, beta))
    traces, x, moved = zip(*outcome, strict=True)
    replayed = replay_lasgd(
        x0.numpy(), traces, lambda rank, _, x: np.full_like(x, 1.0 + rank), SGD(), alpha=alpha, beta=beta
    )
    np.testing.assert_allclose(replayed, torch.stack(x).numpy(), rtol=1e-12, atol=1e-12)
    if beta == 1.0:
        assert mean_drift((x0 + torch.stack(moved)).numpy(), replayed) < 1e-12


@settings(max_examples=100)
@given(st.integers(0, 1), st.integers(0, 6), st.data())
def test_lasgd_rejects_a_trace_with_an_event_lost_or_doubled(rank, index, data):
    trace = TWO_RANKS[rank]
    index = min(index, len(trace) - 1)
    broken = [list(trace) for trace in TWO_RANKS]
    if data.draw(st.booleans(), label="doubled"):
        broken[rank].insert(index, trace[index])
    else:
        # Without its last event, or its last step, a trace is another good one.
        assume(
            index < len(trace) - 1
            and any(event["event"] == trace[index]["event"] for event in trace[index + 1 :])
        )
        del broken[rank][index]
    with pytest.raises(ValueError, match=r"rank [01], event \{"):
        replay_lasgd(np.array([4.0]), broken, quadratic, SGD())


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([[post(0), apply(0)], [step(0)]], r"rank 0, event .*apply.*ranks \[1\] never post"),
        ([[post(1)], []], "rank 0, event .*rank's round 0"),
        ([[apply(0)], [post(0)]], "rank 0, event .*no such round outstanding"),
        ([[], [post(0), post(1)]], "rank 1, event .*round 0 is still outstanding"),
        ([[], [step(1)]], "rank 1, event .*rank's step 0"),
        ([[{"event": "round", "round": 0}], []], "rank 0, event .*no event of LASGD"),
    ],
)
def test_lasgd_says_what_is_wrong_with_a_trace(traces, message):
    with pytest.raises(ValueError, match=message):
        replay_lasgd(np.array([4.0]), traces, quadratic, SGD())


# -- SGD-AR


def allreduce_round(k, num_samples, rate=0.5):
    return {"event": "round", "round": k, "num_samples": num_samples, "learning_rate": rate}


def test_allreduce_weighs_gradients_by_samples_and_numbers_batches_by_contribution():
    asked = []

    def gradient(rank, k, x):
        asked.append((rank, k))
        return quadratic(rank, k, x)

    traces = [
        [
            allreduce_round(0, 3),
            allreduce_round(1, 0),
            allreduce_round(2, 2),
            allreduce_round(3, 0, rate=9.0),
        ],
        [allreduce_round(0, 1), allreduce_round(1, 4), allreduce_round(2, 0), allreduce_round(3, 0)],
    ]
    x = replay_allreduce(np.array([4.0]), traces, gradient, SGD(momentum=0.5))
    # Gradients 3/4 x 4 - 1/4 x 4 = 2; then 3 - 8 = -5, v = -4; then 5, v = 3; then nobody.
    assert x[:, 0].tolist() == [4.0 - 1.0 + 2.0 - 1.5] * 2
    assert asked == [(0, 0), (1, 0), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([[allreduce_round(0, 1)], []], "rank 1, event .*others go on to round 0"),
        ([[allreduce_round(1, 1)], [allreduce_round(1, 1)]], "rank 0, event .*rank's round 0"),
        ([[allreduce_round(0, 1)], [allreduce_round(0, 0, rate=1.0)]], "rank 1, event .*rank 0 updates at"),
        ([[allreduce_round(0, 1)], [post(0)]], "rank 1, event .*no event of SGD-AR"),
    ],
)
def test_allreduce_says_what_is_wrong_with_a_trace(traces, message):
    with pytest.raises(ValueError, match=message):
        replay_allreduce(np.array([4.0]), traces, quadratic, SGD())
