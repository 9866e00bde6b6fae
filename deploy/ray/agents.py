"""Agents of an engine on the nodes of a Ray cluster, which start its ranks: one in each bundle of a placement group.

ray job submit --working-dir . -- python deploy/ray/agents.py --agents 4 --rank-address tcp://HOST:5556 --cpus 4

The controller runs elsewhere, with `--rank-address`, `--agents` and `--local-agent false`. The environment of the job
is the agents' too: DIST_ATTN_MODEL, DIST_ATTN_ENGINE__KEYS_DIR. It ends when the controller lets the agents go.
"""

import argparse
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def agent(number: int, rank_address: str) -> None:
    """Be the agent of a bundle until the controller lets it go; one that ends otherwise Ray starts again."""
    command = [sys.executable, "-m", "dist_attn.control", "agent", f"--rank-address={rank_address}"]
    subprocess.run([*command, f"--agent-name=bundle-{number}"], check=True)


def main() -> None:
    """Place the agents and wait for them."""
    parser = argparse.ArgumentParser(description="Place agents of an engine on a Ray cluster.")
    parser.add_argument("--agents", type=int, required=True, help="as many as engine.agents says")
    parser.add_argument("--rank-address", required=True, help="where the controller listens for agents")
    parser.add_argument("--cpus", type=float, default=1, help="of each agent's ranks together")
    parser.add_argument("--gpus", type=float, default=0, help="likewise")
    parser.add_argument("--strategy", default="SPREAD", help="how Ray places the bundles")
    given = parser.parse_args()
    ray.init()
    bundles = placement_group([{"CPU": given.cpus, "GPU": given.gpus}] * given.agents, strategy=given.strategy)
    ray.get(bundles.ready())
    place = ray.remote(num_cpus=given.cpus, num_gpus=given.gpus, max_retries=-1, retry_exceptions=True)(agent)
    where = [PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=n) for n in range(given.agents)]
    ray.get([place.options(scheduling_strategy=where[n]).remote(n, given.rank_address) for n in range(given.agents)])


if __name__ == "__main__":
    main()
