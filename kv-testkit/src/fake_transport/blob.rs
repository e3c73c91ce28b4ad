//! The fake's peer blob: name, then (id, base, len, key) of each region, then a checksum.

use kv_core::ids::RegionId;

const MAGIC: &[u8; 6] = b"KVFAKE";

/// One region as its peer knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    pub(super) id: RegionId,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) key: u64,
}

/// FNV-1a.
pub(super) fn digest(seed: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(seed, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

/// Start value of [`digest`].
pub(super) const DIGEST_SEED: u64 = 0xcbf2_9ce4_8422_2325;

pub(super) fn encode(name: &str, regions: &[RemoteRegion]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&(name.len() as u32).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
    for r in regions {
        out.extend_from_slice(&r.id.0.to_le_bytes());
        for v in [r.base, r.len, r.key] {
            out.extend_from_slice(&v.to_le_bytes());
        }
    }
    let sum = digest(DIGEST_SEED, &out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// Name and regions, or what is wrong. `trusting` skips the checksum (a flaw).
pub(super) fn decode(blob: &[u8], trusting: bool) -> Result<(String, Vec<RemoteRegion>), String> {
    let (body, sum) = blob.split_last_chunk::<8>().ok_or("shorter than its checksum")?;
    if !trusting && digest(DIGEST_SEED, body) != u64::from_le_bytes(*sum) {
        return Err("checksum does not match".into());
    }
    let rest = body.strip_prefix(MAGIC).ok_or("not a fake transport's blob")?;
    let (len, rest) = rest.split_first_chunk::<4>().ok_or("no name")?;
    let (name, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or("name is cut off")?;
    let name = std::str::from_utf8(name).map_err(|e| e.to_string())?;
    let rows = rest.chunks(28).map(|row| {
        let row: &[u8; 28] = row.try_into().map_err(|_| "a region is cut off".to_string())?;
        let u64_at = |i: usize| {
            let mut b = [0; 8];
            b.copy_from_slice(&row[i..i + 8]);
            u64::from_le_bytes(b)
        };
        let id = u32::from_le_bytes([row[0], row[1], row[2], row[3]]);
        Ok(RemoteRegion { id: RegionId(id), base: u64_at(4), len: u64_at(12), key: u64_at(20) })
    });
    Ok((name.to_string(), rows.collect::<Result<_, String>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back_and_no_damage_passes() {
        let rows = [RemoteRegion { id: RegionId(3), base: 0x1000, len: 64, key: 9 }];
        let blob = encode("a_b\u{e9}", &rows);
        assert_eq!(decode(&blob, false), Ok(("a_b\u{e9}".into(), rows.to_vec())));
        for i in 0..blob.len() {
            assert!(decode(&blob[..i], false).is_err(), "cut at {i}");
            let mut bad = blob.clone();
            bad[i] ^= 1;
            assert!(decode(&bad, false).is_err(), "flipped at {i}");
        }
    }
}
