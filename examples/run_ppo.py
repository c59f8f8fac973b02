"""PPO with one controller: what `onehop ppo` does, as a script.

    python examples/run_ppo.py [--config FILE] [key=value ...]

Without `--config` it runs the sums of the demo, for which `make demo` makes model and prompts.
"""

import argparse
import sys
from pathlib import Path

from nemo_rl.cli.main import main

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "ppo_sums.yaml"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="YAML file of the run")
    parser.add_argument("--debug", action="store_true", help="log everything and show tracebacks")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    sys.exit(main([*["--debug"] * args.debug, "ppo", "--config", str(args.config), *args.overrides]))
