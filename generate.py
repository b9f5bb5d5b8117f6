"""Text to video with Wan2.2 on one or several processes; `--help` lists the flags.

torchrun --nproc-per-node 4 generate.py --ckpt_dir Wan2.2-T2V-A14B-Diffusers --prompt "..."
mpirun -n 4 python generate.py ...
python generate.py --nproc 4 ...
"""

import sys

from usp.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
