#!/bin/sh
# After the package was removed: dpkg says remove or purge, rpm how many versions are left, apk nothing.
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload || :
fi
case "${1:-remove}" in
remove | purge | 0) ;;
*) exit 0 ;;
esac
if [ -d /var/lib/underlease ]; then
  echo 'underlease: /var/lib/underlease is kept: the terms of leases, and the markers of gates, without which applied work would be done again'
fi
for link in /etc/systemd/system/*.wants/underlease@*.timer; do
  if [ -L "$link" ]; then
    echo "underlease: $link is kept, and leads nowhere: somebody had enabled it"
  fi
done
