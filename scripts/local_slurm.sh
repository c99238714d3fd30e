#!/usr/bin/env bash
# A Slurm of one node on this machine, for the tests of sweeps:  scripts/local_slurm.sh start|stop|install
#
# For root on Debian with the packages slurm-wlm and munge (`install` installs them). `start` writes
# /etc/slurm/slurm.conf, the only place where a job's srun looks; an existing configuration of yours is not changed.
set -euo pipefail

export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin" # where the daemons are
conf=/etc/slurm/slurm.conf
state=/var/lib/bnn-local-slurm
mark="# written by local_slurm.sh"

alive() { # alive NAME FILE: whether the process whose id is in the file is running and has this name
    [ -s "$2" ] && [ "$(cat "/proc/$(cat "$2")/comm" 2>/dev/null)" = "$1" ]
}

start() {
    if [ -f "$conf" ] && ! grep -qF "$mark" "$conf"; then
        echo "$conf already exists and was not written by this script. Nothing is started." >&2
        exit 1
    fi
    local host cpus memory
    host=$(hostname -s)
    cpus=$(nproc --all)
    memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    mkdir -p /etc/slurm "$state/ctld" "$state/d" /run/munge /var/log/munge /var/lib/munge
    chown munge: /run/munge /var/log/munge /var/lib/munge
    [ -s /etc/munge/munge.key ] || (umask 077 && head -c 1024 /dev/urandom >/etc/munge/munge.key)
    chown munge: /etc/munge/munge.key && chmod 400 /etc/munge/munge.key
    cat >"$conf" <<END
$mark
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=15
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerParameters=batch_sched_delay=1,sched_interval=2
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory
PartitionName=local Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
    if ! munge -n >/dev/null 2>&1; then
        su -s /bin/sh munge -c "/usr/sbin/munged"
        touch "$state/munged" # this script stops it
    fi
    alive slurmctld "$state/slurmctld.pid" || slurmctld
    alive slurmd "$state/slurmd.pid" || slurmd -N "$host"
    for _ in $(seq 60); do
        if sinfo -h -o %T 2>/dev/null | grep -qE '^(idle|mixed|allocated)$'; then
            echo "Slurm is ready on $host: $cpus processors, $memory MB"
            return
        fi
        scontrol update "NodeName=$host" State=RESUME 2>/dev/null || true
        sleep 1
    done
    echo "Slurm did not become ready. Its logs: $state/slurmctld.log, $state/slurmd.log" >&2
    exit 1
}

stop() {
    if [ ! -f "$conf" ] || ! grep -qF "$mark" "$conf"; then
        echo "no Slurm of this script is running"
        return
    fi
    local name
    for name in slurmd slurmctld; do
        if alive "$name" "$state/$name.pid"; then kill "$(cat "$state/$name.pid")"; fi
    done
    for _ in $(seq 20); do
        alive slurmd "$state/slurmd.pid" || alive slurmctld "$state/slurmctld.pid" || break
        sleep 0.5
    done
    if [ -e "$state/munged" ] && alive munged /run/munge/munged.pid; then kill "$(cat /run/munge/munged.pid)"; fi
    rm -rf "$state" "$conf"
    echo "Slurm is stopped"
}

install() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

case "${1:-}" in
    start | stop | install) "$1" ;;
    *)
        sed -n '2,5p' "$0"
        exit 2
        ;;
esac
