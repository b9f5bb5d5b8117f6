#!/usr/bin/env bash
# Profiles chosen steps of a run on all ranks with Nsight Systems, and reports how much communication hides.

set -euo pipefail

usage() {
    cat <<'HELP'
usage: scripts/profile_overlap.sh [-n RANKS] [-s STEPS] [-o OUT] [-- GENERATE_FLAGS...]

  -n RANKS   processes, one per GPU (default 2)
  -s STEPS   steps to capture, counted from 0: one, or first-last (default 3-4); earlier ones warm up
  -o OUT     path of the results without suffix (default outputs/overlap)

Everything behind -- goes to generate.py. Writes OUT.nsys-rep, OUT.sqlite, OUT.json and OUT.png, prints the table.

    scripts/profile_overlap.sh -n 4 -s 3-4 -- --ckpt_dir /models/Wan2.2-T2V-A14B --size '1280*720' --sample_steps 6
HELP
}

refuse() {
    echo "profile_overlap.sh: $1" >&2
    exit 2
}

ranks=2 steps=3-4 out=outputs/overlap
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        -n | -s | -o)
            [ $# -ge 2 ] || refuse "$1 needs a value; see --help"
            case $1 in -n) ranks=$2 ;; -s) steps=$2 ;; -o) out=$2 ;; esac
            shift 2
            ;;
        --) shift; break ;;
        *) refuse "unknown argument '$1'; put flags for generate.py behind --, or see --help" ;;
    esac
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || refuse "-n is '$ranks'; give a number of processes, such as 2"
[[ $steps =~ ^[0-9]+(-[0-9]+)?$ ]] || refuse "-s is '$steps'; give a step or two, such as 3-4"
command -v nsys > /dev/null || refuse "nsys is not on the PATH; install NVIDIA Nsight Systems (2023.1 or newer)"

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || refuse "no Python at $python; run make venv, or set PYTHON"
mkdir -p "$(dirname "$out")"

# One session for all ranks, so that their clocks are one. The run goes on when the capture ends; the first rank to
# stop ends it for all, which is why the ranks meet before they do.
USP_NVTX=1 USP_PROFILE_STEPS=$steps nsys profile \
    --trace=cuda,nvtx --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop \
    --force-overwrite=true --output="$out" \
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$root/generate.py" "$@"

nsys export --type=sqlite --force-overwrite=true --output="$out.sqlite" "$out.nsys-rep"
"$python" "$root/scripts/overlap_report.py" "$out.sqlite" --json "$out.json" --png "$out.png"
