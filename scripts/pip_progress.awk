# Turns pip's output into a line a download of a megabyte or more, and shows in full what went wrong.
/^ *Downloading .*\([0-9.]+ [MG]B\)/ { sub(/^ */, ""); print "  " $0; fflush(); next }
/^Installing collected packages:/ { print "  installing " NF - 3 " packages"; fflush(); next }
/^WARNING: Retrying/ { print "  " $0; fflush(); next }
/^ *(ERROR|error|Traceback)/ || failed { failed = 1; print; fflush() }
